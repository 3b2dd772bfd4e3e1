-- Returns 1 if the counts can be right: every live request has a lease, and none was lost.
if redis.call('EXISTS', key('damaged')) == 1 then return 0 end
local live, states = 0, redis.call('HGETALL', key('states'))
for i = 1, #states, 2 do
  local number = tonumber(states[i + 1])
  if number < 0 then return 0 end
  if not ENDS[states[i]] then live = live + number end
end
return redis.call('ZCARD', key('leases')) == live and 1 or 0
