"""Anthropic's Messages, OpenAI's Responses and Gemini's generateContent, before an engine that speaks chat completions.

Everything here is pure: client bodies in, chat bodies out, and back. ``server.translation`` is the ASGI layer
that uses it.
"""
