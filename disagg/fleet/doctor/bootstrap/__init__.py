"""What a bare machine lacks before it can be deployed to, and how it gets it.

steps      the table of steps per system. Pure
bootstrap  checks them on a host, and carries out those that are missing
"""
