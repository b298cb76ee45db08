"""`jaxserve chat`: a conversation on a terminal, over HTTP."""
