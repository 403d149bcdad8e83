{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough that the longest suffix still fits a name of 63 characters. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "baton.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What never changes in the life of an installation; the only labels in selectors. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
baton.dev/role: {{ .role }}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/*
`over` laid over `base`, as JSON. Unlike mergeOverwrite it lets false, 0 and "" win, as values of a role must; an empty map
clears what is below it.
*/}}
{{- define "baton.merge" -}}
{{- $merged := deepCopy .base -}}
{{- range $key, $value := .over -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $merged $key)) $value -}}
{{- $_ := set $merged $key (include "baton.merge" (dict "base" (get $merged $key) "over" $value) | fromJson) -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end -}}

{{/* A role's values: the defaults, what workers share, and its own block over both. As JSON: read with fromJson. */}}
{{- define "baton.role" -}}
{{- $merged := deepCopy .root.Values.defaults -}}
{{- if has .role (list "prefill" "decode") -}}
{{- $merged = include "baton.merge" (dict "base" $merged "over" .root.Values.workers) | fromJson -}}
{{- end -}}
{{- include "baton.merge" (dict "base" $merged "over" (index .root.Values .role)) -}}
{{- end -}}

{{- define "baton.port" -}}
{{- get (dict "router" "8000" "bootstrap" "8990" "prefill" "8100" "decode" "8200") . -}}
{{- end -}}

{{- define "baton.image" -}}
{{- $image := index .root.Values.image .which -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{/* One URL for each pod that may ever exist: workers have stable names, and the router asks each whether it is there. */}}
{{- define "baton.urls" -}}
{{- $values := include "baton.role" . | fromJson -}}
{{- $count := int $values.replicas -}}
{{- if $values.autoscaling.enabled -}}
{{- $count = max $count (int $values.autoscaling.maxReplicas) | int -}}
{{- end -}}
{{- $name := printf "%s-%s" (include "baton.fullname" .root) .role -}}
{{- $port := include "baton.port" .role -}}
{{- $urls := list -}}
{{- range $index := until $count -}}
{{- $urls = append $urls (printf "http://%s-%d.%s:%s" $name $index $name $port) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end -}}

{{- define "baton.probe" -}}
httpGet: {path: {{ .path }}, port: http}
periodSeconds: {{ .probe.periodSeconds }}
failureThreshold: {{ .probe.failureThreshold }}
timeoutSeconds: {{ .probe.timeoutSeconds }}
{{- end -}}

{{- define "baton.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "baton.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* A number as a person writes it: merged values are floats, and a large one would become 1e+06. */}}
{{- define "baton.plain" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}{{- else -}}{{ toString . }}{{- end -}}
{{- end -}}
