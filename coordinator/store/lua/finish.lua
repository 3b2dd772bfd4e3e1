-- ARGV: request id, epoch, terminal state. Returns 1 if the request has ended at this epoch.
-- A claim of this epoch, or an earlier one, that comes afterwards takes nothing: its answer was lost, and it was under way.
local id, epoch, to = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local request = read(key('req:', id))
if not request.state or not request.gateway then
  note_lost(id)
  count('unknown')
  redis.call('HSET', key('req:', id), 'state', to, 'epoch', math.max(epoch, tonumber(request.epoch or 0)))
  redis.call('PEXPIRE', key('req:', id), ENDED_KEPT_MS)
  return 0
end
if tonumber(request.epoch) > epoch then
  count('stale')
  return 0
end
if not ENDS[request.state] then enter(id, request, to, epoch) end
return 1
