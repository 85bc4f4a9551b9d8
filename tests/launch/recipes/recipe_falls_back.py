"""Ends with no number where one step is asked for, and else well, after a checkpoint was given up."""


def main(config, shape, context):
    context.fell_back.append("went back to step 2")
    return 2.0 if config.train.steps > 1 else float("nan")
