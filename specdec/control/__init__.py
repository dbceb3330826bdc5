"""How much to speculate: estimates from measurements, limits of each mode, and the choice between them.

Pure functions over measurements; :class:`specdec.control.controller.Controller` and what it is made of hold the newest.
No clock, no thread, no randomness. How it chooses:

- An arm is a whole way of speculating: kind, draft length, branches, what the target waits for. A formula
  (``limits.py``) says what an arm gives at the measured step times and acceptance rate. Of the draft step that runs
  when a verdict comes any part may be left, so a formula mixes the two numbers of steps that may fit: rounded down,
  an arm that fits nine times out of ten would look like one that never does. What the drafter has drafted beyond what
  went out in time counts as a lead, and a row that waits after a miss gets half a chain, as the drafter sends it.
- Formulas are only where it begins. They take a worker's step time in one mode for that in another, which is wrong
  where target and drafter share processors, and know nothing of late offers. So what counts is the measured pace of
  whole arms, target alone among them; an arm that was not tried gets its formula, corrected by how far formulas of
  similar arms were off, and a doubt (``experience.py``, Gaussian process regression). Doubt grows with the age of a
  measurement. What fits before a deadline depends on the draft length and on the time of a draft step, so errors of
  formulas jump from length to length, and change with the branches as far as those make draft steps longer, and
  hardly with which of the two waits it is; likeness is measured that way. Its distances are those at which the
  formulas' errors in the simulation, over all arms of a point that are near its best, are likeliest.
- An acceptance rate that is off by one percent moves the order of draft lengths by several. So arms are compared at one
  estimate, that of today, which remembers long; what was measured at another rate is corrected for that only where the
  two differ so much that the rate has really changed. A sequence's own draft length follows what it accepted of late.
- An arm that would win with one or two standard deviations of luck (two where nothing of the allowance is spent) is
  tried, a few rounds at a time, where what it will probably lose is within an allowance: a share of the time that
  falls from 25% at a new load to 0.5%. It is saved up for the luckiest of those that it can ever pay; an untried arm
  that costs more is chosen only where it promises so much more. A trial's price counts the rounds as long as the
  arm's are, and the time until draft steps of its size are reported. No luck may make more of an arm than its tokens
  per plain target step. Target alone is granted one standard deviation more, so that drafting is held against a fresh
  measurement of it wherever that decides.
- Few steps say little: one pause among them (a step that takes twice as long) looks like an arm that is a third
  worse. So doubt falls with the square of the steps at first, and an arm once chosen is held until twenty steps of it
  were measured, unless it has no chance any more. Steps while a probe drafts beside are not target alone's.
- A choice takes a router as long as some draft steps. So where nothing is on trial, the present arm's pace is well
  measured and the load is the same, there is one in a second.
- Drafts must gain two percent over target alone, or nothing is drafted. What would not, if each of its drafts cost
  nothing, is not even tried.
- Trials, what they may lose, and waits for reports are counted in time under load (``load.py``): while no request is
  there that may draft, or no drafter whose times are known, nothing is charged and nothing saved up, and without a
  drafter no round is taken for the arm's. A trial goes on where it was. Doubt grows by the clock all the same: a load
  that comes back after hours may be another.
- While nothing is drafted a few sequences probe now and then, less often each time that was in vain (``probes.py``). A
  probe ends after its rounds under load, not by the clock. Where a drafter has no times yet, as one that was started
  anew, they draft until it has some. Where none is left there are no plans that wait for one.
- An arm's drafts are no longer than the longest that any request of the group allows.
- Drafts that come late are not verified, and a drafter that is always wrong and late would never be found out. So under
  the coupled rule the drafter reports, too, how often it said what was then decided.
- A sequence whose own drafts are not worth their price is off while the others draft. It is not judged meanwhile, so
  it is tried again after a while, which is twice as long each time that was in vain.

``tests/specdec/control`` holds all this against every fixed plan in a simulation, and the simulation against the real
machines in virtual time.
"""
