"""What a SendingEngine needs whose workers send the KV themselves, and are other processes. No framework.

shipment  one prompt's KV on its way from one worker to the decode host
reports   what the workers report about it, in the process of the engine
runs      the prompts and answers that are computed, as runs of the server's scheduler
"""
