"""The page at /: HTML, CSS and JavaScript as they are in `page/`, without a build step or outside assets."""
