"""An engine in this process: for notebooks, scripts and files of prompts. No server."""
