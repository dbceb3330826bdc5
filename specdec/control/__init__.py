"""How much to speculate: step times, acceptance rates, closed formulas, and what each way really gave.

Pure functions over measurements; :class:`specdec.control.controller.Controller` holds the newest. No clock, no thread,
no randomness. A plan never touches correctness, so none of this has to be right, only mostly so.

- A choice is a way of speculating with a draft length and a fan-out. ``ways.py`` says in closed formulas what each
  gives at the step times that workers report, profiled as they load and measured since, and at the acceptance and guess
  rates of late. Acceptance is kept by temperature: greedy requests are mostly the easier ones.
- A formula knows nothing of processors that target and drafter share, nor of late messages. So each way has a factor,
  measured over predicted pace, by load in octaves of the rows. A way that was never measured gets a little less.
- Nothing is drafted until a gain is likely. While nothing is, one sequence drafts a little now and then.
- Choices and factors belong to the target, not to requests: a burst begins with what earlier ones have taught.
- What is drafted in a target's process, by heads or by look-up, is weighed there: ``gains.py``.
"""
