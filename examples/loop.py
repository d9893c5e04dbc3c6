from barter import DFFKE, Experiment
from barter.data.task import Data

digits = Data(source="digits", validation=0.1)
experiment = Experiment(DFFKE(), data=digits, clients=5, models="small-5", seed=0)
for r in experiment.rounds(10):
    print(
        f"round {r.round}: {r.mean('val'):.1%} on validation images, {r.mean('global'):.1%} on test"
    )
    print(f"    {r.traffic('up') / 1e6:.1f} MB up, {r.traffic('down') / 1e6:.1f} MB down")
    if r.mean("val") > 0.6:
        break
