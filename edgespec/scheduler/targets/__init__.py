"""Several copies of the target check guesses side by side: distributed speculative inference (arXiv 2405.14105).

Read `coordinator.py` first: Algorithm 1 of the paper. `verifier.py` is what runs beside each copy, `places.py` says
where copies can be (threads, processes, a Dask cluster), `guesser.py` has the draft, `opening.py` loads all of it.
"""
