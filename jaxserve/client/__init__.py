"""Clients of a server of the OpenAI API, this one's or another. Know nothing of engines."""
