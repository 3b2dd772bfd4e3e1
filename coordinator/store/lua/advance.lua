-- ARGV: request id, epoch, state; for each move. Returns 1 or 0 for each.
local function move(id, epoch, to)
  local request = read(key('req:', id))
  if not request.state then
    note_lost(id)
    return 'unknown'
  end
  local at = tonumber(request.epoch)
  if to == 'PLACED' or epoch > at then return 'illegal' end
  if epoch < at then return 'stale' end
  local verdict = VERDICT[request.state][to]
  if verdict == 'legal' then enter(id, request, to, epoch) end
  return verdict
end

local done = {}
for i = 1, #ARGV, 3 do
  local verdict = move(ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2])
  if verdict ~= 'legal' then count(verdict) end
  done[#done + 1] = verdict == 'legal' and 1 or 0
end
return done
