"""What the nodes of a translated graph call: functions, graphs within, and nodes that are run alone."""
