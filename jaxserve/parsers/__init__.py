"""What a model's text means: reasoning, content and calls of functions, however it comes in pieces.

Knows text only: no tokens, no requests. What comes out depends on the text alone, never on how it
was cut into pieces.
"""
