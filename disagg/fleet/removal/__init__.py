"""Hosts off their machines: what nothing there needs, and its removal.

leftovers  contents of a machine and hosts.toml -> what is left over there. Pure
removal    finds it on all machines and removes it; a plan that removes one host altogether
"""
