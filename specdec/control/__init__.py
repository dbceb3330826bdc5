"""How much to speculate: step times, acceptance rates, closed formulas, and what each way really gave.

Pure functions over measurements; :class:`specdec.control.controller.Controller` holds the newest. No clock, no thread,
no randomness. A plan never touches correctness, so none of this has to be right, only mostly so.

- A choice is a way of speculating with a draft length and a fan-out. ``ways.py`` says in closed formulas what each
  gives at the step times that workers report, profiled as they load and measured since, and at the acceptance and guess
  rates of late.
- A formula knows nothing of processors that target and drafter share, nor of late messages. So each way has a factor,
  measured over predicted pace, by load in octaves of the rows. What was measured longer ago counts less. A way that was
  never measured gets a little less than its formula. The target alone is remembered as it was measured last.
- Nothing is drafted until a gain is likely. While nothing is, one sequence drafts a little now and then, so that better
  times are noticed.
- Choices and factors belong to the target, not to requests: a burst begins with what earlier ones have taught.
- Sequences that share a target speculate in one way. A sequence that is worse than the others drafts less, and one
  token at least. Acceptance is kept by temperature: greedy requests are mostly the easier ones.
"""
