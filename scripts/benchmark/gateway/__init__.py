"""``scripts/bench gateway``: what a user of the gateway meets, beside what stands between agents and engines elsewhere.

A canned engine answers at once, clients ask so many at a time, and the server in between differs: none at all
(direct), a bare proxy of the same libraries, the gateway, and others that are installed. All of them are commands
in processes of their own, and what they spend is read from the system's accounts of those processes.
"""
