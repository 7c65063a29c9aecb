"""Reports when a host of the fleet goes down and when it comes back.

changes  readings of the fleet's health -> changes. Pure
notify   delivers them to a command or a URL, in the background
"""
