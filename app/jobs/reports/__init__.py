"""Reports of jobs as pages and API objects."""
