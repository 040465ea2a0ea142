"""What an operator needs: health, logs, metrics, traces, start-up checks and the supervisor."""
