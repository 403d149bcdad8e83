# Debian's Redis in the place of redis, for machines that reach no image registry.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends redis-server \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -o 999 -g 999 /data
WORKDIR /data
USER 999:999
EXPOSE 6379
CMD ["redis-server"]
