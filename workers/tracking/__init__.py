"""What a run leaves behind: its folder, its loggers, alarms, and the replay of a recorded step."""
