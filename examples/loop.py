from barter import DFFKE, Experiment

experiment = Experiment(DFFKE(), data="digits", clients=5, models="small-5", seed=0)
for r in experiment.rounds(10):
    print(f"round {r.round}: {r.mean('before_global'):.1%} alone, {r.mean('global'):.1%} after the exchange")
    print(f"    {r.traffic('up') / 1e6:.1f} MB up, {r.traffic('down') / 1e6:.1f} MB down")
    if r.mean("global") > 0.6:
        break
