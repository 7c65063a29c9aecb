"""TLS between the programs of one fleet, with a key that follows from its token; and for the callers of a gateway.

Every holder of the token derives the same key and the same certificate. A server presents it; a client accepts no
other, so that a server proves that it has the token before it is sent anything. No certificate is made, copied or
renewed.

certificate  key and certificate of a token, and what each end makes of them
callers      a certificate that callers of a gateway know, in files
transport    TLS between an asyncio transport and a protocol
"""
