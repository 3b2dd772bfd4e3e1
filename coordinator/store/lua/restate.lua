-- ARGV: worker id, incarnation, role, info: what it states anew. Returns 1; 0 if that incarnation is not current; or the
-- side that nobody would have then.
local id, to = ARGV[1], ARGV[3]
local node = key('node:', id)
local known = redis.call('HMGET', node, 'incarnation', 'term', 'role')
if known[1] ~= ARGV[2] or known[2] == '0' then return 0 end

local has = {prefill = to ~= 'decode', decode = to ~= 'prefill'}
for _, other in ipairs(worker_ids()) do
  local row = redis.call('HMGET', key('node:', other), 'term', 'until', 'draining', 'role')
  if other ~= id and row[1] and row[1] ~= '0' and tonumber(row[2]) > NOW_MS and row[3] == '0' then
    has.prefill = has.prefill or row[4] ~= 'decode'
    has.decode = has.decode or row[4] ~= 'prefill'
  end
end
local is_new = known[3] ~= to
if is_new and not has.prefill then return 'prefill' end
if is_new and not has.decode then return 'decode' end

-- As if it had joined now: gateways read again what it states.
redis.call('HSET', node, 'role', to, 'info', ARGV[4], 'joined', NOW_US)
touch(id)
if is_new then count('role_changes') end
return 1
