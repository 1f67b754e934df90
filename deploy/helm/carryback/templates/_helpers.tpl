{{- define "carryback.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* 40 characters, so that the pods' names of the longest part are names in DNS, too. */}}
{{- define "carryback.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "carryback.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "carryback.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Labels that select a part's pods: (list $ "router"). */}}
{{- define "carryback.selector" -}}
app.kubernetes.io/name: {{ include "carryback.name" (index . 0) }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* All labels of a part: (list $ "router"). */}}
{{- define "carryback.labels" -}}
{{ include "carryback.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "carryback.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "carryback.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* An image's name: (list $ .Values.images.router). */}}
{{- define "carryback.image" -}}
{{- $image := index . 1 -}}
{{ $image.repository }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end }}

{{- define "carryback.secret" -}}
{{- .Values.secrets.existingSecret | default (printf "%s-keys" (include "carryback.fullname" .)) }}
{{- end }}

{{- define "carryback.hasTenants" -}}
{{- if or .Values.tenants.list .Values.tenants.existingSecret }}true{{ end }}
{{- end }}

{{/* Whether routers share a state. */}}
{{- define "carryback.isShared" -}}
{{- if or .Values.redis.enabled .Values.redis.url .Values.redis.existingSecret.name }}true{{ end }}
{{- end }}

{{/* A variable from the keys' Secret: (list $ "VARIABLE" "KEY"). */}}
{{- define "carryback.secretEnv" -}}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef: {name: {{ include "carryback.secret" (index . 0) }}, key: {{ index . 2 }}}
{{- end }}

{{/* The address of the state that routers share, and its password before it. */}}
{{- define "carryback.stateEnv" -}}
{{- with .Values.redis }}
{{- if .existingSecret.name }}
- name: CARRYBACK_STATE
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret.name }}, key: {{ .existingSecret.key }}}
{{- else if .url }}
- name: CARRYBACK_STATE
  value: {{ .url | quote }}
{{- else if .enabled }}
{{ include "carryback.secretEnv" (list $ "REDIS_PASSWORD" "REDIS_PASSWORD") }}
- name: CARRYBACK_STATE
  value: redis://:$(REDIS_PASSWORD)@{{ include "carryback.fullname" $ }}-redis:6379/0
{{- end }}
{{- end }}
{{- end }}

{{/* What all pods have in common. */}}
{{- define "carryback.pod" -}}
# Kubernetes would set CARRYBACK_PORT and the like for a Service of that name, which are settings of ours.
enableServiceLinks: false
automountServiceAccountToken: false
serviceAccountName: {{ include "carryback.serviceAccount" . }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "carryback.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "carryback.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Over nodes and zones, as far as there are some: (list $ "router"). */}}
{{- define "carryback.spread" -}}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "carryback.selector" $ | nindent 6 }}
{{- end }}
{{- end }}

{{/* The environment of a container with engines. */}}
{{- define "carryback.engineEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
# All that engines write goes to volumes.
- {name: HOME, value: /home/carryback}
- {name: USER, value: carryback} # PyTorch asks for one, also where the user's number has no name
- {name: HF_HOME, value: /models}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
{{- with .Values.model.token }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "carryback.engineMounts" -}}
- {name: models, mountPath: /models}
- {name: home, mountPath: /home/carryback}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- end }}

{{- define "carryback.engineVolumes" -}}
- {name: home, emptyDir: {}}
- {name: tmp, emptyDir: {}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .Values.engines.sharedMemory }}}}
{{- with .Values.model.cache }}
{{- if .existingClaim }}
- {name: models, persistentVolumeClaim: {claimName: {{ .existingClaim }}}}
{{- else if .hostPath }}
- {name: models, hostPath: {path: {{ .hostPath }}, type: DirectoryOrCreate}}
{{- else if not .claim.size }}
- {name: models, emptyDir: {sizeLimit: {{ .emptyDirSize }}}}
{{- end }}
{{- end }}
{{- end }}

{{- define "carryback.engineClaims" -}}
{{- with .Values.model.cache }}
{{- if and .claim.size (not .existingClaim) (not .hostPath) }}
volumeClaimTemplates:
  - metadata: {name: models}
    spec:
      accessModes: [{{ .claim.accessMode }}]
      {{- with .claim.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources: {requests: {storage: {{ .claim.size }}}}
{{- end }}
{{- end }}
{{- end }}

{{- define "carryback.engineSecurity" -}}
{{- $base := fromYaml (include "carryback.containerSecurity" .) }}
{{- if .Values.engines.ipcLock }}
{{- $_ := set $base.capabilities "add" (list "IPC_LOCK") }}
{{- end }}
{{- toYaml (mergeOverwrite $base (deepCopy .Values.engines.securityContext)) }}
{{- end }}

{{/* An engine's resources: (list $ GPUS RESOURCES). */}}
{{- define "carryback.engineResources" -}}
{{- $root := index . 0 -}}
{{- $resources := mergeOverwrite (deepCopy $root.Values.engines.resources) (deepCopy (index . 2)) }}
{{- if gt (int (index . 1)) 0 }}
{{- $limits := merge (dict $root.Values.engines.gpuResource (index . 1)) (dig "limits" dict $resources) }}
{{- $_ := set $resources "limits" $limits }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Addresses in the chart's own namespace, of an engines' Service: (list $ "prefill"). */}}
{{- define "carryback.engineHost" -}}
{{ include "carryback.fullname" (index . 0) }}-{{ index . 1 }}.{{ (index . 0).Release.Namespace }}.svc
{{- end }}

{{/* The first of an engine's three ports, by its role: HTTP; the next are for events and NIXL's handshake. */}}
{{- define "carryback.port" -}}
{{- index (dict "prefill" 8100 "decode" 8200) . }}
{{- end }}

{{/* The router's settings, but for what is secret. */}}
{{- define "carryback.routerConfig" -}}
{{- $config := dict "host" .Values.bindAddress "port" 8000 "admin_host" .Values.bindAddress "admin_port" 8001 }}
{{- $_ := set $config "shutdown_wait_s" .Values.router.shutdownWaitSeconds }}
{{- $_ := set $config "shutdown_timeout_s" .Values.router.shutdownTimeoutSeconds }}
{{- if include "carryback.hasTenants" . }}
{{- $_ := set $config "tenants_file" "/etc/carryback/tenants/tenants.yaml" }}
{{- end }}
{{- if .Values.router.enabled }}
{{- $engines := list }}
{{- range $role := list "prefill" "decode" }}
{{- if (index $.Values $role).enabled }}
{{- $host := include "carryback.engineHost" (list $ $role) }}
{{- $port := int (include "carryback.port" $role) }}
{{- $engines = append $engines (dict "role" $role "url" (printf "http://%s:%d" $host $port) "events" (printf "tcp://%s:%d" $host (add1 $port)) "dns" true) }}
{{- end }}
{{- end }}
{{- $_ := set $config "engines" (concat $engines .Values.externalEngines) }}
{{- end }}
{{- toYaml (merge $config .Values.router.config) }}
{{- end }}
