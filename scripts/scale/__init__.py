"""Databases with very many rollouts, and how long commands and views take on them.

``scripts/make_database`` runs ``many_rollouts``, ``scripts/measure_queries`` runs ``measurement``.
"""
