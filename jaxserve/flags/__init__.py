"""What commands can be told: the arguments and their types. Decides nothing."""
