-- ARGV: lease_ms, request ids. Returns how many leases were renewed: what has ended has none. A lease that Redis lost is
-- there again; one whose request it lost is not.
local until_ms, found = NOW_MS + tonumber(ARGV[1]), 0
for i = 2, #ARGV do
  local state = redis.call('HGET', key('req:', ARGV[i]), 'state')
  if state and not ENDS[state] then
    redis.call('ZADD', key('leases'), until_ms, ARGV[i])
    found = found + 1
  elseif not state then
    note_lost(ARGV[i])
  end
end
return found
