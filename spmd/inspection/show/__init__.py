"""Records as text, pages and files of other programs.

In the order of reading:

- `words`: sentences, figures and cells, made once for terminal and page.
- `times`: what is said of the time of a call, likewise.
- `folds`: paths of arrays as few rows.
- `plan_words`: what is said of a plan, likewise.
- `layout`: tables, trees and text at any width.
- `cells`: cells of tables that several share.
- `lanes`: the time of a call.
- `terminal`: a report.
- `diff`: a difference.
- `sweep`: a sweep.
- `plan`: a plan, the differences of two, and prices of other places.
- `why`: origins.
- `pictures`: pictures of arrays.
- `drawn`: each record by its class, as text.
- `page`: reports, differences, sweeps, plans and pictures as HTML.
- `progress`: that something is going on.
- `perfetto`: a report as a trace.
- `scalars`: a report as flat figures.
"""
