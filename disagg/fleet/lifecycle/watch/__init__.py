"""Notices when a host of the fleet goes down and when it comes back.

changes  readings of the fleet's health -> changes. Pure
notify   tells a command or a URL about them, in the background
"""
