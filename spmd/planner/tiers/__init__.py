"""From thousands of layouts to the few that were compiled, each tier dearer than the one before.

In the order of reading:

- `choice`: a layout on a mesh as a search knows it, and what comes of a search.
- `looking`: a search on its way: what is asked of it, and the layouts that it knows.
- `estimated`: of each mesh the layouts that are best by classes alone.
- `previewed`: the exchanges that Shardy makes of the best ones of all meshes.
- `compiled`: what the compiler says of the best of these.
- `varied`: the best ones once more, pinned in other ways.
"""
