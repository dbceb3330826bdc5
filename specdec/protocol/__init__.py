"""The messages and the state machines of ingress, router, target and drafter.

The target commits tokens; the router has the log of record; the drafter says nothing that must be true or in time;
the ingress has the request and what its client got. Messages may be lost, doubled, delayed and reordered, and every
process may die at any moment. ``epoch`` counts the openings of a sequence on a worker; ``prefix_hash`` is a length of
its log and the hash of that many tokens. The rules, by the numbers under which other modules name them:

1. No rewind: no message has a target take back a committed token under the current epoch.
2. Append once, and check: of a verdict the router takes what is beyond its own log, if the result has the verdict's
   prefix hash; else it opens the sequence anew. The ingress does the same with new tokens.
3. Credit: a target commits a bounded number of tokens beyond the last acknowledgement, then the sequence pauses.
4. To open is idempotent; a closed sequence leaves a tombstone, which only a newer epoch passes.
5. Leases are per sequence, renewed for those that an ingress still wants; with them end blocks, slots and branches.
6. An offer is used if its epoch is current and its chain, or a branch, agrees with all that was committed since its
   prefix; what remains of it is the draft.
7. Who lost its cache to others is not unknown: a target keeps the log and reads it again; a drafter short of room drops
   branches first, then chains, and says so.
8. After a target's death its sequences are opened elsewhere from the router's log; after a router's death the ingress
   submits them again with the tokens it has; after a drafter's death sequences go on plainly.
9. A draft never ends a sequence: it is cut at its first id outside the target's vocabulary, a step that fails with
   drafts is tried without them, and a token drafter or heads that raise are switched off for the sequence.
10. A drafter draws by the same pipeline as the target. That is for acceptance; exactness never depends on it.
11. The ingress finds stop strings, in the text, and cancels.
12. The target decides every other finish while it walks the accepted run; nothing after it is committed.
13. Error is a finish, final like the others, with a reason: it ends one sequence, never a worker.
14. Sequences carry the fingerprint of their model. Who is another refuses them, and no token of another model is taken.
15. Who drains refuses what is new, and keeps what it has until that ends or is opened elsewhere: a strict
    sequence, on a target that is known to have the same bits.
16. Whoever was in a step that failed, or on a target that died, is tried again apart from others until it has taken a
    step. Who fails alone twice ends with an error, and nothing is opened again without end.
17. A strict target names a hash of its logits in its heartbeats, and with a sequence's first tokens. A sequence that
    keeps its bits keeps to that hash: targets with another refuse it, and if no target has it any more it ends with
    an error that says so.
"""
