{{/* What the pods of all components have in common. Called with (dict "root" $ "values" VALUES "hostPID" BOOL). */}}
{{- define "tandem.podSpec" -}}
automountServiceAccountToken: false
# A Service named "tandem" would become TANDEM_PORT=tcp://..., which is a setting.
enableServiceLinks: false
{{- if not .hostPID }}
# The pod's first process reaps, and passes a signal that comes before a service listens for it.
shareProcessNamespace: true
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .values.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints: {{ toJson . }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* The start of a container of ours. Called with the root. */}}
{{- define "tandem.container" -}}
image: {{ include "tandem.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* Called with the list of capabilities to add. */}}
{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end }}

{{/* How a service reaches the others. */}}
{{- define "tandem.sharedEnv" -}}
- name: TANDEM_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret.existingSecret | default (include "tandem.name" .) }}
      key: {{ if .Values.secret.existingSecret }}{{ .Values.secret.key }}{{ else }}secret{{ end }}
{{- if .Values.redis.existingSecret }}
- name: TANDEM_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: {{ .Values.redis.key }}}
{{- else if .Values.redis.url }}
- name: TANDEM_REDIS_URL
  value: {{ .Values.redis.url | quote }}
{{- else }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "tandem.name" . }}, key: redis-password}
- name: TANDEM_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "tandem.name" . }}-redis:6379/0
{{- end }}
- name: TANDEM_POOL
  value: {{ .Values.pool | default (printf "%s.%s" .Release.Namespace (include "tandem.name" .)) | quote }}
{{- end }}

{{/* Settings as variables, sorted by name. Numbers go through JSON, which writes 8388608 and not 8.388608e+06. */}}
{{- define "tandem.settings" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ toJson $value | quote }}{{ end }}
{{- end }}
{{- end }}

{{/* The variables of the model, for gateways and workers. */}}
{{- define "tandem.modelEnv" -}}
- name: TANDEM_MODEL
  value: {{ .Values.model.name | quote }}
{{- if include "tandem.hubModel" . }}
- name: HF_HOME
  value: /var/cache/huggingface
{{- with .Values.model.hub }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.modelMounts" -}}
{{- if or .Values.model.claim .Values.model.hostPath .Values.model.image }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if include "tandem.hubModel" . }}
- {name: hub, mountPath: /var/cache/huggingface}
{{- end }}
{{- end }}

{{- define "tandem.modelVolumes" -}}
{{- with .Values.model }}
{{- if .claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .claim }}, readOnly: true}
{{- else if .hostPath }}
- name: models
  hostPath: {path: {{ .hostPath | quote }}, type: Directory}
{{- else if .image }}
- name: models
  image: {reference: {{ .image | quote }}, pullPolicy: IfNotPresent}
{{- end }}
{{- end }}
{{- if include "tandem.hubModel" . }}
- name: hub
  {{- if .Values.model.hub.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.model.hub.claim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- end }}

{{/* /health is for restarting, /ready for sending traffic. Called with the seconds that a start may take. */}}
{{- define "tandem.probes" -}}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ divf . 5 | ceil | int }}
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{/* Evictions go one at a time, and one that does not work anyway is let go. */}}
{{- define "tandem.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "tandem.name" .root }}-{{ .component }}
  labels: {{- include "tandem.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "tandem.selector" . | nindent 6 }}
{{- end }}
