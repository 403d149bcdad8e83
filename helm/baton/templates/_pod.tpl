{{/*
The one pod of all four roles. Called with (dict "root" $ "role" ROLE "values" MERGED), and "rank" "follower" for the
pods of a multi-node worker that are not its leader.
*/}}
{{- define "baton.pod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $values := .values -}}
{{- $worker := has $role (list "prefill" "decode") -}}
{{- $follower := eq (default "leader" .rank) "follower" -}}
{{- $port := include "baton.port" $role -}}
metadata:
  labels:
    {{- include "baton.labels" . | nindent 4 }}
    {{- if $follower }}
    baton.dev/rank: follower
    {{- end }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ $role }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "baton.serviceAccountName" $root }}
  automountServiceAccountToken: false
  # A Service named …-router would put BATON_ROUTER_PORT=tcp://… into every pod, and Baton reads variables of that name.
  enableServiceLinks: false
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- include "baton.podSecurityContext" $root | nindent 4 }}
  terminationGracePeriodSeconds: {{ add (int $values.preStopSeconds) (int $values.drainSeconds) 15 }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if and $worker $values.runtimeClassName }}
  runtimeClassName: {{ $values.runtimeClassName }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $values.topologySpread.enabled }}
  topologySpreadConstraints:
    - maxSkew: {{ $values.topologySpread.maxSkew }}
      topologyKey: {{ $values.topologySpread.topologyKey }}
      whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "baton.selector" . | nindent 10 }}
  {{- end }}
  {{- if and $worker $root.Values.model.prepare.enabled }}
  initContainers:
    - name: prepare-model
      image: {{ required "model.prepare.image is needed when model.prepare.enabled" $root.Values.model.prepare.image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command:
        {{- toYaml $root.Values.model.prepare.command | nindent 8 }}
      {{- with $root.Values.model.prepare.envFromSecret }}
      envFrom:
        - secretRef: {name: {{ . }}}
      {{- end }}
      securityContext:
        {{- include "baton.containerSecurityContext" $root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: {{ $root.Values.model.mountPath }}}
  {{- end }}
  containers:
    - name: {{ $role }}
      image: {{ include "baton.image" (dict "root" $root "which" (ternary "engine" "frontend" $worker)) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [{{ printf "baton_%s" $role }}]
      env:
        {{- include "baton.env" . | nindent 8 }}
      ports:
        - {name: http, containerPort: {{ $port }}}
        {{- if eq $role "prefill" }}
        - {name: bootstrap, containerPort: 8998}
        {{- end }}
      startupProbe:
        {{- include "baton.probe" (dict "path" "/health" "probe" $values.probes.startup) | nindent 8 }}
      {{- if not $follower }}
      readinessProbe:
        {{- include "baton.probe" (dict "path" "/ready" "probe" $values.probes.readiness) | nindent 8 }}
      {{- end }}
      livenessProbe:
        {{- include "baton.probe" (dict "path" "/health" "probe" $values.probes.liveness) | nindent 8 }}
      {{- if not $follower }}
      lifecycle:
        preStop:
          exec:
            {{- if $worker }}
            # Refuse new work at once and stay until every router has seen it; SIGTERM then lets running requests finish.
            command: [/opt/baton/bin/python, -m, baton_probe, "http://127.0.0.1:{{ $port }}/drain", POST, {{ $values.preStopSeconds | quote }}]
            {{- else }}
            # Serve on until the endpoints no longer name this pod; SIGTERM then lets running streams finish.
            command: [/opt/baton/bin/python, -c, "import time; time.sleep({{ $values.preStopSeconds }})"]
            {{- end }}
      {{- end }}
      resources:
        {{- include "baton.resources" . | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurityContext" $root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if and (eq $role "router") $values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /run/baton-keys, readOnly: true}
        {{- end }}
        {{- if include "baton.hasToken" . }}
        - {name: registry-token, mountPath: /run/baton-registry, readOnly: true}
        {{- end }}
        {{- if and (has $role (list "router" "bootstrap")) $values.redis.existingSecret }}
        - {name: redis-password, mountPath: /run/baton-redis, readOnly: true}
        {{- end }}
        {{- if $worker }}
        - {name: shm, mountPath: /dev/shm}
        {{- if include "baton.hasModelVolume" $root }}
        - {name: models, mountPath: {{ $root.Values.model.mountPath }}, readOnly: true}
        {{- end }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    {{- if and (eq $role "router") $values.apiKeys.existingSecret }}
    - name: api-keys
      secret: {secretName: {{ $values.apiKeys.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- if include "baton.hasToken" . }}
    - name: registry-token
      secret: {secretName: {{ $root.Values.registryToken.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- if and (has $role (list "router" "bootstrap")) $values.redis.existingSecret }}
    - name: redis-password
      secret: {secretName: {{ $values.redis.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- if $worker }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize }}}
    {{- include "baton.modelVolume" $root | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* What the chart itself decides, then `settings` under the role's own names, then extraEnv. */}}
{{- define "baton.env" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $worker := has .role (list "prefill" "decode") -}}
{{- $registry := printf "http://%s-bootstrap:8990" (include "baton.fullname" $root) -}}
- {name: BATON_LOG_FORMAT, value: {{ $root.Values.observability.logFormat }}}
{{- if ne .role "bootstrap" }}
- {name: BATON_REGISTRY, value: {{ $registry | quote }}}
- {name: BATON_DRAIN_MS, value: {{ mul (int $values.drainSeconds) 1000 | quote }}}
{{- end }}
{{- if include "baton.hasToken" . }}
- {name: {{ ternary "BATON_BOOTSTRAP_TOKEN_FILE" "BATON_REGISTRY_TOKEN_FILE" (eq .role "bootstrap") }}, value: {{ printf "/run/baton-registry/%s" $root.Values.registryToken.key | quote }}}
{{- end }}
{{- if not $worker }}
{{- with $values.redis.url }}
- {name: BATON_{{ upper $.role }}_REDIS, value: {{ . | quote }}}
{{- end }}
{{- if $values.redis.existingSecret }}
- {name: BATON_{{ upper .role }}_REDIS_PASSWORD_FILE, value: {{ printf "/run/baton-redis/%s" $values.redis.key | quote }}}
{{- end }}
{{- end }}
{{- if ne .role "bootstrap" }}
{{- with $root.Values.observability.tracing }}
{{- if .endpoint }}
- {name: BATON_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: BATON_TRACE_RATIO, value: {{ .ratio | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .role "router" }}
- {name: BATON_ROUTER_PREFILL, value: {{ include "baton.urls" (dict "root" $root "role" "prefill") | quote }}}
- {name: BATON_ROUTER_DECODE, value: {{ include "baton.urls" (dict "root" $root "role" "decode") | quote }}}
{{- if $values.apiKeys.existingSecret }}
# Read again when the secret changes.
- {name: BATON_ROUTER_KEYS_FILE, value: {{ printf "/run/baton-keys/%s" $values.apiKeys.file | quote }}}
{{- end }}
{{- end }}
{{- if $worker }}
- name: BATON_ADVERTISE_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: BATON_MODEL, value: {{ $root.Values.model.name | quote }}}
{{- with $root.Values.model.servedName }}
- {name: BATON_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
- {name: BATON_DEVICE, value: {{ ternary "cuda" "cpu" (gt (int $values.gpus) 0) }}}
- {name: BATON_DTYPE, value: {{ $values.dtype }}}
- {name: BATON_KV_TOKENS, value: {{ int $values.kvTokens | quote }}}
- {name: BATON_TRANSFER, value: {{ $values.transfer }}}
# The worker gives up loading when the startup probe does, so that its own log has the last word.
- {name: BATON_START_MS, value: {{ mul (int $values.probes.startup.periodSeconds) (int $values.probes.startup.failureThreshold) 1000 | quote }}}
{{- end }}
{{- if and $worker (dig "multinode" "enabled" false $values) }}
# The same command on every node; the operator that makes the group says which node this is, and where the first one is.
- {name: BATON_NNODES, value: {{ $values.multinode.size | quote }}}
- name: BATON_NODE_RANK
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
- {name: BATON_DIST_INIT_ADDR, value: "$(LWS_LEADER_ADDRESS):{{ int $values.multinode.port }}"}
{{- end }}
{{- $role := .role }}
{{- range $key, $value := $values.settings }}
- {name: {{ printf "BATON_%s_%s" (upper $role) (upper $key) }}, value: {{ include "baton.plain" $value | quote }}}
{{- end }}
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Who writes to the registry, or is it; decode only reads. */}}
{{- define "baton.hasToken" -}}
{{- if and (ne .role "decode") .root.Values.registryToken.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "baton.resources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- if and (has .role (list "prefill" "decode")) (gt (int .values.gpus) 0) -}}
{{- $limits := default (dict) $resources.limits -}}
{{- $_ := set $limits .values.gpuResource (int .values.gpus) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "baton.hasModelVolume" -}}
{{- $model := .Values.model -}}
{{- $chosen := compact (list $model.existingClaim (ternary "claim" "" $model.claim.enabled) (ternary "cache" "" $model.cache.enabled)) -}}
{{- if gt (len $chosen) 1 -}}
{{- fail "model: choose one of existingClaim, claim.enabled and cache.enabled" -}}
{{- end -}}
{{- if and $model.prepare.enabled (not $chosen) -}}
{{- fail "model.prepare needs a place to put the model: model.existingClaim, model.claim or model.cache" -}}
{{- end -}}
{{- join "" $chosen -}}
{{- end -}}

{{- define "baton.modelVolume" -}}
{{- if include "baton.hasModelVolume" . -}}
- name: models
  {{- if .Values.model.cache.enabled }}
  emptyDir: {sizeLimit: {{ .Values.model.cache.sizeLimit }}}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ default (printf "%s-models" (include "baton.fullname" .)) .Values.model.existingClaim }}}
  {{- end }}
{{- end -}}
{{- end -}}
