-- ARGV: request id, epoch, terminal state. Returns 1 if the request has ended at this epoch.
local id, epoch, to = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local request = read(key('req:', id))
if not request.state then
  note_lost(id)
  count('unknown')
  return 0
end
if tonumber(request.epoch) ~= epoch then
  count('stale')
  return 0
end
if not ENDS[request.state] then enter(id, request, to, epoch) end
return 1
