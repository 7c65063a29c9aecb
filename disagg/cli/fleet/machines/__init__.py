"""The commands about machines as such.

bootstrap  what a bare machine needs
prune      what is left over on them
"""
