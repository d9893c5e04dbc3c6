from barter import DFFKE, Experiment

experiment = Experiment(DFFKE(), data="digits", clients=5, models="small-5", seed=0)
for r in experiment.rounds(10):
    print(
        f"round {r.round}: {r.mean('global'):.1%} on all classes, {r.mean('local'):.1%} on a client's own"
    )
    print(f"    {r.traffic('up') / 1e6:.1f} MB up, {r.traffic('down') / 1e6:.1f} MB down")
    if r.mean("global") > 0.6:
        break
