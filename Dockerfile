# Two images from one file: `--target api` (no torch) and `--target worker` (CUDA torch).
FROM python:3.13-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 SPARD_DATA_DIR=/data
RUN useradd --create-home --uid 10001 spard && install -d -o spard -g spard /data
WORKDIR /srv
COPY pyproject.toml constraints.txt README.md ./
COPY app ./app
COPY worker ./worker
COPY spard ./spard
COPY migrations ./migrations

FROM base AS api
RUN pip install -c constraints.txt .
USER spard
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
CMD ["uvicorn", "app.main:checked_app", "--factory", "--host", "0.0.0.0", "--port", "8000"]

FROM base AS worker
RUN pip install -c constraints.txt ".[worker]"
USER spard
CMD ["celery", "-A", "worker.celery_app", "worker", "--pool=solo", "-c", "1", "--without-gossip", "--without-mingle", "--loglevel=INFO"]
