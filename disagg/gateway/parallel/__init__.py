"""POST /v1/parallel: several requests in one body, answered together.

body    reads the body: one dialect and one request, or one error, for each item
answer  runs the items at the same time and sends what they give
"""
