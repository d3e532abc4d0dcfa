"""Records as text, pages and files of other programs.

In the order of reading:

- `layout`: tables, trees and text at any width.
- `words`: what is said of the origin of a sharding.
- `terminal`: a report.
- `diff`: a difference.
- `sweep`: a sweep.
- `why`: origins.
- `pictures`: pictures of arrays.
- `page`: all of them as HTML.
- `drawn`: each record by its class.
- `progress`: that something is going on.
- `perfetto`: a report as a trace.
- `scalars`: a report as flat figures.
"""
