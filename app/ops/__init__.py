"""Operations: health, logs, metrics, traces, start-up checks, child processes and the supervisor."""
