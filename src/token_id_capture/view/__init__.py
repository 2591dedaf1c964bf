"""The live page: rollouts as they run, in a browser. Read-only, beside any number of writers.

``follow`` looks for changes, once for all who watch; ``reads`` answers what a page asks for; ``access`` says who may
look; ``app`` puts them together. The page itself, and the data in it, are those of ``report``.
"""
