"""Records as text, pages and files of other programs.

In the order of reading:

- `layout`: tables, trees and text at any width.
- `words`: what is said of the origin of a sharding.
- `terminal`: a report.
- `diff`: a difference.
- `sweep`: a sweep.
- `why`: origins.
- `pictures`: pictures of arrays.
- `progress`: that something is going on.
- `page`: all of them as HTML.
- `perfetto`: a report as a trace.
- `scalars`: a report as flat figures.
"""
