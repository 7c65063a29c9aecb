"""The web page.

app        routes and the task that grades
progress   what it shows of a notebook's layers
uploads    notebooks and zip files within bounds
templates  pages, rendered on the server; progress.js polls while a batch runs
"""
