"""Grades programming notebooks in four layers; the last two ask two models of a disagg gateway.

rubric      assignment folders: sections, points, weights, expected outputs
notebook    notebooks within bounds, as cells grouped by section
sandbox     runs a notebook in a kernel without network and files
validate    layer 1: sections, variables, cells that ran
compare     layer 2: outputs against the solution notebook's
solution    is the solution notebook fit to compare with?
prompts     layers 3 and 4: what the models read, and the schema of what they answer
injection   instructions to the models in a student's text
models      the gateway: both models at once, figures, retries
score       points from the four layers, never outside the rubric
store       SQLite: submissions, grades, corrections, figures of the models
pipeline    notebooks through the layers, each exactly once
report      CSV
cli, web    the two ways to use it
"""
