"""The clients of the gateway.

keys    their keys, in a file
access  who may use the gateway, and which models
limits  requests and tokens per minute of a key
"""
