"""`jaxserve bench`: how fast a server of the OpenAI API is under a load, or the engine alone."""
