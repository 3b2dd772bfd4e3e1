{{- define "tandem.name" -}}
{{- if contains "tandem" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-tandem" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* What selects the pods of a component. Called with (dict "root" $ "component" NAME). */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tandem.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end }}

{{/* The values of a worker role: its own over the defaults. Called with (dict "root" $ "role" NAME). */}}
{{- define "tandem.worker" -}}
{{- mergeOverwrite (deepCopy .root.Values.workers.defaults) (deepCopy (index .root.Values.workers .role)) | toJson }}
{{- end }}

{{/* The roles that have workers, as a JSON list. */}}
{{- define "tandem.roles" -}}
{{- $roles := list }}
{{- range $role := list "prefill" "decode" "mixed" }}
  {{- $worker := include "tandem.worker" (dict "root" $ "role" $role) | fromJson }}
  {{- if or (gt (int $worker.replicas) 0) $worker.autoscaling.enabled }}{{ $roles = append $roles $role }}{{ end }}
{{- end }}
{{- $roles | toJson }}
{{- end }}

{{/* A hub id is ORG/NAME, and no path. */}}
{{- define "tandem.hubModel" -}}
{{- if and (regexMatch "^[^/.~][^/]*/[^/]+$" .Values.model.name) (not (hasSuffix ".gguf" .Values.model.name)) }}yes{{ end }}
{{- end }}

{{/* What no schema can say. */}}
{{- define "tandem.check" -}}
{{- if and .Values.redis.url .Values.redis.existingSecret }}
{{- fail "redis.url and redis.existingSecret exclude each other: empty one of them" }}
{{- end }}
{{- if gt (len (compact (list .Values.model.claim .Values.model.hostPath .Values.model.image))) 1 }}
{{- fail "model.claim, model.hostPath and model.image exclude each other: empty all but one of them" }}
{{- end }}
{{- if and (hasPrefix "/models/" .Values.model.name) (not (or .Values.model.claim .Values.model.hostPath .Values.model.image)) }}
{{- fail (printf "model.name is %s, but nothing is at /models: set model.claim, model.hostPath or model.image" .Values.model.name) }}
{{- end }}
{{- $roles := include "tandem.roles" . | fromJsonArray }}
{{- if not (or (has "mixed" $roles) (and (has "prefill" $roles) (has "decode" $roles))) }}
{{- fail "no worker can serve a request: set workers.prefill.replicas and workers.decode.replicas, or workers.mixed.replicas" }}
{{- end }}
{{- range $role := $roles }}
  {{- $worker := include "tandem.worker" (dict "root" $ "role" $role) | fromJson }}
  {{- if $worker.autoscaling.enabled }}
    {{- if not $.Values.autoscaling.prometheus }}
      {{- fail (printf "workers.%s.autoscaling is enabled: set autoscaling.prometheus to the URL of a Prometheus that reads the workers" $role) }}
    {{- end }}
    {{- if gt (int $worker.autoscaling.min) (int $worker.autoscaling.max) }}
      {{- fail (printf "workers.%s.autoscaling.min is above its max" $role) }}
    {{- end }}
  {{- end }}
  {{- if and $.Values.sharedGpus.count $worker.gpus }}
    {{- fail (printf "workers.%s.gpus and sharedGpus.count exclude each other: make one of them 0" $role) }}
  {{- end }}
  {{- if and $.Values.sharedGpus.count (not (hasPrefix "cuda" (get $worker.settings "TANDEM_DEVICE"))) }}
    {{- fail (printf "sharedGpus.count is set: name the GPU of workers.%s.settings.TANDEM_DEVICE, such as cuda:0" $role) }}
  {{- end }}
{{- end }}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) }}
{{- fail "inferencePool.enabled: set inferencePool.endpointPicker.name to the Service of your endpoint picker" }}
{{- end }}
{{- end }}
