"""The layer in front of the gateway that lets clients of other dialects call it."""
