"""The clients of the gateway.

keys    their keys, in a file
access  who may use the gateway, and which models
origins  which web pages may ask it
kept    responses that are kept for the requests that follow them
limits  requests and tokens per minute of a key
"""
