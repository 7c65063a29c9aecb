"""What clients in their newest versions can do in front of a gateway, as one table.

    python -m benchmarks.clients [CLIENT...] [--again] [--page docs/clients.md]

Each client is installed into an environment of its own, in a folder outside the repository (--cache), with pip or npm.
Its program (`programs/`) asks the demo fleet through a gateway for one feature after the other, and prints what came of
each. A client that was measured before is not measured again without --again; one that cannot be installed, or does not
end in time, is a row that states so. The programs have a home folder of their own and proxies that refuse: what would
leave the machine fails.

table         the clients, and what is installed for each
environments  their environments
measure       one client in front of the fleet
page          the table as Markdown
"""
