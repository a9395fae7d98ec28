"""Where each role should run: cluster, models, step graph, pools, plan. Loads neither torch nor ray."""
